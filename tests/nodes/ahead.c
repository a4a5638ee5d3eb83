/* Wall clocks that are AHEAD seconds ahead, for one process and its children (LD_PRELOAD). What counts from the boot is as
   it was. libfaketime would do more: with DONT_FAKE_MONOTONIC it breaks clock_nanosleep, and so Python's time.sleep. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t ahead(void)
{
	const char *text = getenv("AHEAD");
	return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	static int (*real)(clockid_t, struct timespec *);
	if (!real)
		real = dlsym(RTLD_NEXT, "clock_gettime");
	int failed = real(clock, now);
	if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
		now->tv_sec += ahead();
	return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec seen;
	int failed = clock_gettime(CLOCK_REALTIME, &seen);
	(void)zone;
	now->tv_sec = seen.tv_sec;
	now->tv_usec = seen.tv_nsec / 1000;
	return failed;
}

time_t time(time_t *now)
{
	struct timespec seen;
	clock_gettime(CLOCK_REALTIME, &seen);
	if (now)
		*now = seen.tv_sec;
	return seen.tv_sec;
}
