"""Values between ranks: groups, collectives, halos, stages' messages, layouts."""
