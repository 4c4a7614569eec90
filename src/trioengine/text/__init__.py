"""Text and tokens: tokenizer, chat templates, decoding of single tokens. No torch."""
