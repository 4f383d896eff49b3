"""Commands to another process of a run: calls, streams of weights, errors, and the death of either process.

`isolated` runs functions of the user in processes of their own, `user_calls` decides where such a function runs.

`link.Link` carries them over a pipe or a socket. On Ray, actors call one another (`trivium.cluster.actors`), with the
same `answers.Answer`.
"""
