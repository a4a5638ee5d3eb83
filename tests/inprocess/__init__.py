"""A Redis in this process: the Lua that ships, on plain Python values and a clock that the test holds.

``server.py`` is what tests use. It lies below the product's own client and codec, so all but the socket is real; that
these commands mean what Redis means by them is what the contract tests show, which run on both.
"""
