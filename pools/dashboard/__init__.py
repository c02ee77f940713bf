"""The web page of `pools dashboard`: what the pools are at, live, and what they were at any moment that the logs know.

It only reads: actors as any driver does, and logs as `pools log` does. sources.py asks, history.py reads logs, feed.py
knows what is new, server.py speaks HTTP; the page itself is in static/, plain ES modules without a build.
"""
