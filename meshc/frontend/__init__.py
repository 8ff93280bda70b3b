"""From a user's model to torch's graph: which models are accepted, how a model is traced, and errors for what cannot be traced."""
