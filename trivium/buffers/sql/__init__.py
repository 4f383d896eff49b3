"""The buffer of several processes: slots and groups in a database."""
