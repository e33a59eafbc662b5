"""Jobs, pools of accelerators, arrivals and prices."""
