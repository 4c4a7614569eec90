"""Models: what a name stands for, fetching and converting a checkpoint, what its files say."""
