"""verl's workers and worker groups, over `cluster.actor_group`."""
