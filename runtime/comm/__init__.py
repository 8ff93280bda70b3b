"""Communication between ranks: process groups, collectives, halos, pipeline messages, transfers of stored tensors, host copies."""
