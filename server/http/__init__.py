"""HTTP before the routes: connections, checks and bodies; errors; the API's description."""
