"""Policy losses: a loss for each token; who averages is the objective."""
