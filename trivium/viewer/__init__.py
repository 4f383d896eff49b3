"""`trivium view`: a local page over run directories, and the values that it and `trivium report` show."""
