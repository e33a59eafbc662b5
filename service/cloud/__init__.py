"""Cloud instances with changing prices."""
