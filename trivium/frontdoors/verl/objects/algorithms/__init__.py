"""verl's functions of estimators, losses and rollout correction, over `trivium.algorithms`."""
