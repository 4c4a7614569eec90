"""The model runner on torch: the only room of the engine where tensors live."""
