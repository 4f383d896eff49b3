"""Policy losses: functions that return a loss for each token; the objective averages."""
