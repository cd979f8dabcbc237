"""DeepSpeed's optimizers by their names: `adam`."""
