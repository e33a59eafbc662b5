"""Cost-optimal use of cloud instances with changing prices."""
