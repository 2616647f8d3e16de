#!/bin/bash
# Shakespeare's plays, 1.1 MB: 90% for training, 10% for validation.
NAME=tinyshakespeare
ABOUT="Shakespeare's plays (1.1 MB), train and val 9 : 1"
BPE=bytes
. "$(dirname "$0")/common.sh"

fetch "$DIR/input.txt" 1115394 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed \
    https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
prepare "$DIR/input.txt" --split 0.9
