from embed.main import run

run()
