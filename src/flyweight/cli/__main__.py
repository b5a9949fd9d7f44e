"""python -m flyweight.cli"""

from flyweight.cli import main

if __name__ == "__main__":
    main()
