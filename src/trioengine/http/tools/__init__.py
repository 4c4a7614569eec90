"""Tool calls: how the families of models spell them in text, and how clients read them."""
