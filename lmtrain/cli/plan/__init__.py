"""`lmtrain plan`: layouts with their prices, as a table and as a page."""
