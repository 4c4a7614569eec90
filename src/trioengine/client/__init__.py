"""The server's half of the engine: its state, its open streams, who may ask and who waits."""
