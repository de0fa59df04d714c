"""Where pages go that leave the device: the memory of the host, and files behind it."""
