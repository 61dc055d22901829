"""What computes layers: finding and starting the native worker."""
