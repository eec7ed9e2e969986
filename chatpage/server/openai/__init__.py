"""The API of OpenAI, for clients that know no other: `router` has the endpoints, `errors` the shape of everything that fails.

Nothing is imported here: the errors are used by modules that the router needs.
"""
