"""Operations of training alone."""
