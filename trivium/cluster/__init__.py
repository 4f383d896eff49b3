"""The roles of a run as Ray actors, on one machine or many. Besides the front doors, the only user of Ray."""
