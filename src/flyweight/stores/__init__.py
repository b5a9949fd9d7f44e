"""Where bytes rest: directories today, object stores behind the same port."""
