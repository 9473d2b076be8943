// Package webhook answers the admission requests for pods and claims of a driver.
package webhook
