"""The 2BW engine on plain torch: weight stores, messages between stages."""
