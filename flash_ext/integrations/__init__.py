"""Where this library plugs into others: one module for each of them."""
