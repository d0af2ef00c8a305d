"""Model definitions. Arrays carry their axes as a suffix (`q_TNH`); the key, for the whole project:

B batch rows    R rows of a step      T query tokens of a step    S tokens in a page, or cached tokens
D model width   F hidden width        N query heads               K KV heads         G query heads per KV head (N / K)
H head size     C 2H: K and V lanes   V vocabulary                E experts          L layers     P pages
"""
