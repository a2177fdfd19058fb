# %% [markdown] name="question"
# # placeholder
# %% [markdown] name="task-6-1-asked"
# Write the rows.
# %% name="task-6-1" task="6.1"
def one_f_one_b(ranks, microbatches):
    """The rows of 1F1B: lists of actions such as "0F0", one list a rank."""
    ### BEGIN SOLUTION
    rows = []
    for rank in range(ranks):
        warm_up = min(microbatches, ranks - 1 - rank)
        row = [f"{rank}F{m}" for m in range(warm_up)]
        for m in range(microbatches):
            if warm_up + m < microbatches:
                row.append(f"{rank}F{warm_up + m}")
            row.append(f"{rank}B{m}")
        rows.append(row)
    return rows
    ### END SOLUTION
