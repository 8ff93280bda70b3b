"""The rules over torch's own sample inputs: what an operator and its gradient become, node by node, split and put together again."""
