"""What is minimised: distances of student and teacher, the penalty on alpha, and its steered weight."""
