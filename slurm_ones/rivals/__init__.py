"""The policies that ours is compared with, one file each, each naming the paper that it follows."""
