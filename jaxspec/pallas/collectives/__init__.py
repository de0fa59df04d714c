"""Sum over devices through peers' memory."""
