"""Arithmetic in which every row's bits are a function of that row alone.

Libraries choose the order of additions by the shape of a call, so a token's hidden state depends
on how many tokens are computed with it: a decode step, a chunk of a prefill and a training batch
differ in the last bits. The functions here fix that order. The backward is not theirs: see
`autograd`.
"""
