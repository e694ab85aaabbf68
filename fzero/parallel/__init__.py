from fzero.values.ragged import ragged_all_to_all
