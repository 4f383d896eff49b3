"""`trivium view`: a local page over run directories, and the values that the page and `trivium report` show."""
