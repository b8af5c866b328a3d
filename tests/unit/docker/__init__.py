"""The scripts of docker/, which is a folder of programs and no package."""
