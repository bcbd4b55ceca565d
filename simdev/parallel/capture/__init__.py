"""What each rank of a training job executes, as PyTorch's own parallel libraries do it on a fake process group."""
