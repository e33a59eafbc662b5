"""Moving between cloud regions while prices change."""
