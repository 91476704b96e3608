"""FASER behind Ray Serve: gateways before replicas. Needs the extra `ray`."""
