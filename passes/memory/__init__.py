"""Passes that trade memory for time: values that backward recomputes, and values, parameters and optimizer state that are offloaded."""
