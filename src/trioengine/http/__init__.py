"""The HTTP front: OpenAI JSON in, events out. Knows the engine client; never zmq or torch."""
