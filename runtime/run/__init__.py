"""Running a rank's program: instructions, compiled regions, autograd, CUDA graphs, recording."""
