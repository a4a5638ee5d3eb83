"""What a release consists of: wheel and sdist, an offline bundle and a Debian package. The product never imports it."""
