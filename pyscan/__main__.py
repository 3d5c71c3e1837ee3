from pyscan.cli import main

raise SystemExit(main())
