# The course in a container:
#   docker build -t ddp-course . && docker run --rm -it -p 8888:8888 --shm-size 1g ddp-course
FROM python:3.12-slim

RUN useradd --create-home --uid 1000 student
USER student
WORKDIR /home/student/course
COPY --chown=student . .
RUN python tools/setup_env.py
ENV PATH=/home/student/course/.venv/bin:$PATH VIRTUAL_ENV=/home/student/course/.venv

EXPOSE 8888
CMD ["ddp-course", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser"]
