"""Who splits what: factors, names, the plan's words, propagation."""
