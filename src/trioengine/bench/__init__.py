"""``trioengine bench``: drive a server, the library or one stream, and say how far it is from best.

Theory of operation. A *workload* says how many clients ask for what; its prompts are made up from
a seed and sized with the model's own tokenizer, another set for each repeat. A client process of
its own (``client``) sends them and does nothing but note which bytes came when; they are parsed
when the run is over (``sse_record``). ``summary`` turns records into rates and percentiles,
``machine`` measures what the hardware gives, ``floor`` says how fast that would be at best.
"""
